"""Built-in kv, one file each."""
