"""The asynchronous SDK: the source that `_sync` is generated from (see `scripts/unasync.py`)."""
