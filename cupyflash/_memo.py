"""What is made once and used again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Memo:
    """The ``size`` values that were used last, by their keys. Threads share it; what is made for one, no other makes.

    >>> squares = Memo(2)
    >>> [squares.get(n, lambda: n * n) for n in (1, 2, 3)], squares.find(1), squares.find(2)
    ([1, 4, 9], None, 4)
    """

    def __init__(self, size: int):
        self.size = size
        self.values: OrderedDict[Hashable, Any] = OrderedDict()  # the least recently used first
        self._lock, self._making = threading.RLock(), threading.RLock()

    def find(self, key: Hashable) -> Any:
        """The value, or None; it does not wait for others that are being made."""
        with self._lock:
            value = self.values.get(key)
            if value is not None:
                self.values.move_to_end(key)
            return value

    def keep(self, key: Hashable, value: Any) -> None:
        with self._lock:
            self.values[key] = value
            self.values.move_to_end(key)
            if len(self.values) > self.size:
                self.values.popitem(last=False)

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value, which ``make`` makes where there is none."""
        value = self.find(key)
        if value is None:
            with self._making:
                value = self.find(key)
                if value is None:
                    value = make()
                    self.keep(key, value)
        return value
