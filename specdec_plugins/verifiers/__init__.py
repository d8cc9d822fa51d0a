"""Built-in verifiers, one file each."""
