"""The arrays of a CPU launch as the runtime sees them: regions of memory, and the elements in them."""

import ctypes
import functools
import operator
from collections.abc import Sequence

import numpy as np

from cudascope.arguments.arrays import Array
from cudascope.cpu.abi import REGION, SHARED_ARRAY, Mode, Space


@functools.lru_cache(maxsize=256)
def _places(arrays: tuple[tuple, ...]) -> ctypes.Array:
    """Return the offset and the bytes of each array. The runtime only reads them."""
    return (SHARED_ARRAY * len(arrays))(*(array[1:3] for array in arrays))


_EARLIER = 2  # in a map of written elements: by an earlier launch. The runtime writes 1
_MOST_COPIED = 64 << 20
"""Bytes outside of the arguments that a launch copies at most. The storage of a view may be the memory of an engine."""


def _elements_in(array: Array, start: int, granule: int, written: np.ndarray) -> np.ndarray:
    """Return which entries of a map of written elements belong to elements of `array`."""
    inside = np.zeros(written.size, bool)
    if array.is_contiguous:
        first = (array.address - start) // granule
        inside[max(first, 0) : first + -(-array.extent // granule)] = True
        return inside
    offsets = np.zeros(array.shape, np.int64)
    for dim, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        shape = [size if d == dim else 1 for d in range(len(array.shape))]
        offsets += (np.arange(size) * stride * array.itemsize).reshape(shape)
    for byte in range(0, array.itemsize, granule):
        index = (offsets + (array.address - start + byte)) // granule
        inside[index[(index >= 0) & (index < written.size)]] = True
    return inside


def _overlaps(arrays: Sequence[Array], start: int, end: int) -> bool:
    return any(each.address < end and start < each.address + each.extent for each in arrays if each.size)


class Memory:
    """The arrays of a launch as regions: those that overlap, or are views of one storage, are one.

    A region has the whole storage of its views. It stays at its address, without a copy, if most of a large storage is
    outside of the views.
    `variables` belong to the compiled file, and `reached` is the memory that `cudascope.reachable` names. Both stay
    at their address. A variable with the name of other memory is called ::name.
    """

    def __init__(self, arrays: dict[str, Array], variables: dict[str, Array], reached: dict[str, Array]) -> None:
        named = arrays | reached
        variables = {f"::{name}" if name in named else name: array for name, array in variables.items()}
        self._variables, self._reached = frozenset(variables), frozenset(reached)
        self._written: list[tuple] = []  # report, start and granule of a map, the map, and the one of this launch
        self._staying: set[str] = set()  # at their address, because a struct or a table leads there
        self.arrays = {name: array for name, array in (named | variables).items() if array.size}
        self.names = tuple(self.arrays)
        self.regions: list[list] = []  # [start, end, bytes of the smallest element, names]
        places = [(*array.memory, array.itemsize, name) for name, array in self.arrays.items()]
        for start, end, itemsize, name in sorted(places, key=operator.itemgetter(0, 1)):
            if self.regions and start < self.regions[-1][1]:
                last = self.regions[-1]
                last[1], last[2] = max(last[1], end), min(last[2], itemsize)
                last[3].append(name)
            else:
                self.regions.append([start, end, itemsize, [name]])

    def describe(self, request, parameters, values, run, shared, guards, variables, objects) -> tuple:
        """Fill in the request's regions. Return the memory that it points to. Keep it until the launch has ended."""
        written_to = {parameter.name for parameter in parameters if not parameter.const}
        words = [
            int.from_bytes(value[i : i + 8], "little")
            for parameter, value in zip(parameters, values, strict=True)
            if not parameter.pointer and ctypes.sizeof(value) >= 8
            for value in [bytes(value)]
            for i in range(0, len(value) - 7, 8)
        ]
        regions = (REGION * len(self.regions))()
        for region, (start, end, granule, names) in zip(regions, self.regions, strict=True):
            region.start, region.bytes, region.granule = start, end - start, granule
            # A kernel that has two ways to a tensor, one by a pointer in a struct, would see a copy by one way alone.
            stays = bool(self._reached.intersection(names)) or any(start <= word < end for word in words)
            if end - start > _MOST_COPIED:
                stays |= end - start - sum(self.arrays[name].extent for name in names) > _MOST_COPIED
            if stays:
                self._staying.update(names)
            region.in_place = 1 if self._variables.intersection(names) else 2 * stays
            region.constant = not region.in_place and written_to.isdisjoint(names)
            if run.mode == Mode.CHECK:
                wants = [each for each in run.watching if _overlaps(each.outputs, start, end)]
                report = wants[0].report if wants else run.report
                written = known = report.written_map(start, granule, (end - start) // granule)
                if run.outer:
                    np.copyto(written, _EARLIER, where=written > 0)
                if wants:
                    written = self._with_others(known, wants, start, granule)
                if run.outer or wants:
                    self._written.append((report, start, granule, known, written))
                region.written, region.expect_written = written.ctypes.data, bool(wants)
        pointed = [
            (i, next(r for r, region in enumerate(self.regions) if parameter.name in region[3]))
            for i, parameter in enumerate(parameters)
            if parameter.pointer and parameter.name in self.arrays
        ]
        pointers = (ctypes.c_uint32 * len(pointed))(*(i for i, _ in pointed))
        pointer_regions = (ctypes.c_uint32 * len(pointed))(*(r for _, r in pointed))
        places = tuple(_places(tuple(arrays)) for arrays in (shared, guards, variables, objects))
        request.regions, request.num_regions = regions, len(regions)
        request.pointers, request.pointer_regions, request.num_pointers = pointers, pointer_regions, len(pointed)
        request.shared, request.guards, request.variables, request.objects = places
        request.num_shared, request.num_guards = len(shared), len(guards)
        request.num_variables, request.num_objects = len(variables), len(objects)
        return regions, pointers, pointer_regions, places

    @staticmethod
    def _with_others(known: np.ndarray, wants: Sequence, start: int, granule: int) -> np.ndarray:
        """Return a copy of a map in which everything that belongs to no output counts as written earlier."""
        outputs = np.zeros(known.size, bool)
        for each in wants:
            for array in each.outputs:
                if _overlaps([array], start, start + known.size * granule):
                    outputs |= _elements_in(array, start, granule, known)
        return np.where(outputs, known, np.uint8(_EARLIER))

    def tell_all(self, run) -> None:
        """Enter what a checked launch has written in the reports of all checks around it."""
        for report, start, granule, known, written in self._written:
            new = written == 1
            np.minimum(known, 1, out=known)
            known[new] = 1
            for each in run.watching:
                if each.report is not report:
                    each.report.written_map(start, granule, written.size)[new] = 1

    def region_beside(self, address: int) -> int:
        """Return the region at its own address that `address` misses by less than 16 bytes; -1 if there is none.

        Allocators keep so many bytes between two arrays. An address farther away may belong to anything.
        """
        for r, (start, end, _, names) in enumerate(self.regions):
            if start - 16 <= address < end + 16 and self._staying.intersection(names):
                return r
        return -1

    def moved_from(self, address: int) -> str | None:
        """Return the argument that has this address before and after a launch; None if there is none."""
        return next((names[0] for start, end, _, names in self.regions if start <= address < end), None)

    def element_at(self, region: int, offset: int) -> tuple[str, int, str]:
        """Name, element and description of the place `offset` bytes into a region (or beyond its ends)."""
        start, _, _, names = self.regions[region]
        address = start + offset

        def distance(name: str) -> int:
            array = self.arrays[name]
            return max(array.address - address, address - array.address - array.extent + 1, 0)

        name = min(names, key=distance)
        array = self.arrays[name]
        element, size = (address - array.address) // array.itemsize, array.extent // array.itemsize
        if not 0 <= element < size:
            start, end = array.memory
            of = f" of {(end - start) // array.itemsize} elements"
            if start <= address < end:
                return name, element, f"{name}[{element}], outside of this view, in the storage{of}"
            if (start, end) != (array.address, array.address + array.extent):
                side = "before" if address < start else "past the end of"
                return name, element, f"{name}[{element}], {side} the storage{of} that {name} is a view of"
            side = "before its first element" if element < 0 else f"past its end ({size} elements)"
            return name, element, f"{name}[{element}], {side}"
        if array.is_contiguous and len(array.shape) > 1:
            index = ", ".join(str(int(i)) for i in np.unravel_index(element, array.shape))
            return name, element, f"{name}[{element}] = {name}[{index}]"
        return name, element, f"{name}[{element}]"

    def elements(self, events, shared) -> tuple[np.ndarray, np.ndarray]:
        """Which tensor or shared array, and which element of it (4 bytes if shared), each event touched; -1: none."""
        tensor, element = events["region"].astype(np.int16), events["offset"] // 4
        for r, (start, _, _, names) in enumerate(self.regions):
            of_region = (events["space"] == Space.GLOBAL) & (events["region"] == r)
            first = self.arrays[names[0]]  # where an access is outside of all views
            at = events["offset"] + start - first.address
            tensor[of_region], element[of_region] = self.names.index(names[0]), at[of_region] // first.itemsize
            for name in reversed(names):
                array = self.arrays[name]
                at = events["offset"] + start - array.address
                inside = of_region & (at >= 0) & (at < array.extent)
                tensor[inside], element[inside] = self.names.index(name), at[inside] // array.itemsize
        return tensor, element
