"""Fast forms of what checkpoints carry in plain torch; each registers itself with the operators that it speeds up."""
