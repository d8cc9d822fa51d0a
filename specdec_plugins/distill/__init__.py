"""`specdec distill`: trains a drafter of DSpark's kind for a target, from texts and from its own outputs."""
