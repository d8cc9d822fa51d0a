"""Built-in schedulers, one file each."""
