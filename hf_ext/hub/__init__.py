"""The Hub: read checkpoints (`checkpoints`), publish (`publish`, `load_check`, `cards`), serve one's own (`server`).

Nothing is imported here, so that serving a Hub does not load torch.
"""
