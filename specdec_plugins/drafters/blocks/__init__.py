"""Drafters that fill a whole block in one forward, from features of the target: DSpark and DFlash."""
