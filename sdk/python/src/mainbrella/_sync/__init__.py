"""The blocking SDK. Generated from `_async` by `scripts/unasync.py`; only `net.py` is written by hand."""
