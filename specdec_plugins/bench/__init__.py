"""`specdec bench`: the same prompts through this library and through others, in one process, the sides alternating."""
