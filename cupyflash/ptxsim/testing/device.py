"""`cupy.cuda` of the simulated device: one device, on which every launch is done when the call returns."""

import contextlib

from ..devices import DEVICES
from ..errors import CompileError
from ..settings import current
from .memory import MemoryPointer, uninitialised
from .partial import Partial


class Device(Partial, contextlib.AbstractContextManager):
    """The one device. `compute_capability` and the `attributes` are those of the architecture in force.

    >>> from cupyflash import ptxsim
    >>> with ptxsim.settings(arch="sm_90"):
    ...     Device().compute_capability, Device(0).attributes["MaxSharedMemoryPerBlockOptin"]
    ('90', 232448)
    """

    def __init__(self, device=0):
        if int(device) != 0:
            raise CUDARuntimeError(f"device {int(device)}: the simulator has device 0 only")
        self.id = 0

    def __exit__(self, *exception):
        return None

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device)

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return "<CUDA Device 0, simulated>"

    def use(self):
        """Nothing: it is in use."""

    def synchronize(self):
        """Nothing: every launch is done when the call returns."""

    @property
    def compute_capability(self):
        return current().arch.removeprefix("sm_")

    @property
    def attributes(self):
        """What GPUs of this architecture have in common, and the multiprocessors of the first one that bounds are
        given for; KeyError for all else.
        """
        capability = int(self.compute_capability)
        return {
            **({"MultiProcessorCount": count} if (count := _multiprocessors()) else {}),
            "ComputeCapabilityMajor": capability // 10,
            "ComputeCapabilityMinor": capability % 10,
            "MaxSharedMemoryPerBlock": 48 * 1024,
            "MaxSharedMemoryPerBlockOptin": current().shared_limit,
            "MaxThreadsPerBlock": 1024,
            "WarpSize": 32,
        }


class Stream(Partial, contextlib.AbstractContextManager):
    """A stream whose work is done as soon as it is given."""

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.null = null

    def __exit__(self, *exception):
        return None

    done = True

    def use(self):
        return self

    def synchronize(self):
        """Nothing: all of its work is done."""

    def wait_event(self, event):
        """Nothing: the event has happened."""

    def record(self, event=None):
        return event or Event()


Stream.null = Stream(null=True)


class Event(Partial):
    """An event that has happened."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        pass

    done = True

    def record(self, stream=None):
        """Nothing: the work before it is done."""

    def synchronize(self):
        """Nothing: it has happened."""


class MemoryPool(Partial):
    """What gives memory back to the device; here NumPy does by itself."""

    def free_all_blocks(self, stream=None):
        """Nothing: no memory is kept."""


class CUDARuntimeError(RuntimeError):
    """There is no such device."""


def alloc(size):
    """Memory of so many bytes, uninitialised."""
    return MemoryPointer.to(uninitialised(size, "u1"))


def get_elapsed_time(start_event, end_event):
    """NotImplementedError: time passes on a GPU only."""
    raise NotImplementedError("cupy.cuda.get_elapsed_time: the simulator does not know how long a GPU would take")


_PROPERTIES = {  # of getDeviceProperties, and what Device.attributes call them
    "major": "ComputeCapabilityMajor",
    "maxThreadsPerBlock": "MaxThreadsPerBlock",
    "minor": "ComputeCapabilityMinor",
    "multiProcessorCount": "MultiProcessorCount",
    "sharedMemPerBlock": "MaxSharedMemoryPerBlock",
    "sharedMemPerBlockOptin": "MaxSharedMemoryPerBlockOptin",
    "warpSize": "WarpSize",
}


def _device_properties(device):
    attributes = Device(device).attributes
    known = {name: attributes[other] for name, other in _PROPERTIES.items() if other in attributes}
    return {"name": f"cupyflash.ptxsim {current().arch}".encode(), **known}


def _multiprocessors():
    return next((device.sms for device in DEVICES.values() if device.arch == current().arch), None)


RUNTIME = {
    "CUDARuntimeError": CUDARuntimeError,
    "deviceSynchronize": lambda: None,
    "getDevice": lambda: 0,
    "getDeviceCount": lambda: 1,
    "getDeviceProperties": _device_properties,
    "is_hip": False,
    "setDevice": lambda device: Device(device).use(),
    "streamSynchronize": lambda stream: None,
}
STREAM = {
    "Event": Event,
    "Stream": Stream,
    "get_current_stream": lambda device_id=-1: Stream.null,
    "get_elapsed_time": get_elapsed_time,
}
CUDA = {
    **STREAM,
    "Device": Device,
    "MemoryPointer": MemoryPointer,
    "alloc": alloc,
    "get_device_id": lambda: 0,
    "is_available": lambda: True,
}
COMPILER = {"CompileException": CompileError}
