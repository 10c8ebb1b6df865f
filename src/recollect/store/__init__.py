"""Stores for kept tensors: in host memory, or the user's own."""

from recollect.store.host import HostStore, host_store
from recollect.store.protocol import Store, check_store

__all__ = ["HostStore", "Store", "check_store", "host_store"]
