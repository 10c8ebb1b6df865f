"""Stores for kept tensors: on the device, in host memory, or the user's own."""

from recollect.store.host import HostStore, host_store
from recollect.store.protocol import DeviceStore, Store, check_store

__all__ = ["DeviceStore", "HostStore", "Store", "check_store", "host_store"]
