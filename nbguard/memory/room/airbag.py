"""The airbag, host memory that an allocator falls back to where it would raise that a device is out of memory.

The kernels are the same in the same order, only slower on that memory, so the results are the same to the bit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from nbguard.errors import NbguardError, NoTorchError
from nbguard.memory.core import advice
from nbguard.memory.room.device import MovingDevice, RoomDevice, SetAside, device_now
from nbguard.units import MiB, format_bytes

_PAGE = 2 * MiB
"""Bytes of the driver's page; PyTorch asks for whole ones."""
_LEAST = 64 * MiB


@dataclass(eq=False, kw_only=True)
class Airbag:
    """The airbag that is on."""

    stands_for: MovingDevice
    size: int  # bytes of host memory
    reserve: SetAside
    most: int = 0  # bytes seen in it at once
    vain: tuple[int, int] = (0, 0)  # (bytes in it, room on the device) at the last move that brought nothing back

    @property
    def device(self) -> str:
        """Return the name of the device that it stands in for."""
        return self.stands_for.name

    @property
    def spilled(self) -> int:
        """Return the bytes that lie in it now, from any thread."""
        nbytes = self.reserve.spilled()
        self.most = max(self.most, nbytes)
        return nbytes

    @property
    def smallest(self) -> int:
        """Return the bytes of the smallest block that lies in it, 0 if none does."""
        blocks = (block for segment in self.reserve.segments() for block in segment.blocks)
        return min((block.size for block in blocks if block.state != "inactive"), default=0)

    @property
    def spilled_at_least(self) -> int:
        """Return the bytes that lay in it at once, at least, when the allocator's peak was reached.

        Bytes allocated then beyond the most that the device ever had reserved lay outside of it.
        """
        peak, reserved = self.reserve.peaks()
        return max(0, peak - (reserved - self.size))

    @property
    def peak(self) -> int:
        """Return the allocator's own peak, with the bytes in the airbag."""
        return self.reserve.peaks()[0]

    @property
    def is_limited(self) -> bool:
        """Say whether a memory fraction has been set since it is on, as PyTorch then spills all that it allocates."""
        return self.reserve.is_limited()


_ON: list[Airbag] = []


def airbag_now() -> Airbag | None:
    """Return the airbag that is on, if any."""
    return _ON[0] if _ON else None


def inflate(nbytes: int) -> Airbag:
    """Set `nbytes` of host memory aside for the current device, in the place of an earlier reserve.

    Raises:
        NbguardError: it cannot be done here; nothing was changed.
        NoTorchError: PyTorch is not imported yet.
    """
    if "torch" not in sys.modules:
        raise NoTorchError
    device = device_now()
    if not isinstance(device, MovingDevice):
        raise NbguardError("an airbag stands in for a CUDA device of NVIDIA's, and PyTorch has none here")
    if nbytes < _LEAST:
        raise NbguardError(f"an airbag takes {format_bytes(_LEAST)} or more, as in  " + advice.airbag().command)
    size = -(-nbytes // _PAGE) * _PAGE
    device.refuse_reserve(size)
    deflate()
    on = Airbag(stands_for=device, size=size, reserve=device.set_aside(size))
    _ON.append(on)
    return on


def deflate() -> bool:
    """Give the host memory back; return whether there was an airbag.

    Raises:
        NbguardError: tensors lie in it; it stays.
    """
    if not _ON:
        return False
    on = _ON[0]
    if spilled := on.spilled:
        raise NbguardError(
            f"{format_bytes(spilled)} of tensors lie in the airbag, and {on.device} has no room for them: free some first ("
            + advice.REPORT.command
            + " shows what holds it)"
        )
    _ON.clear()
    on.reserve.end()
    return True


def forget(device: RoomDevice) -> None:
    """Forget the airbag of a device that is gone with all that lay in it."""
    _ON[:] = [on for on in _ON if on.stands_for is not device]
