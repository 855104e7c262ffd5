"""Data as people have them: what they are, how they are opened, and which part measures."""
