"""Built-in drafters, one file each."""
