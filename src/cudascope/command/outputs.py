"""The tensors that `cudascope run` prints or saves."""

import numpy as np

from cudascope.arguments.arrays import Array, numbers_of


def described(name: str, array: Array, file: str | None) -> str:
    """Describe a tensor by its first and last elements, or save it in `file`."""
    numbers = numbers_of(array.owner, array.dtype)
    title = f"{name} = {array.dtype}[{','.join(map(str, array.shape))}]"
    if file:
        with open(file, "wb") as target:  # np.save would add an ending to the name
            np.save(target, numbers)
        return f"{title}: saved in {file}"
    shown = [str(number) for number in numbers.ravel()[:4]]
    if numbers.size > 8:
        shown.append("…")
    shown += [str(number) for number in numbers.ravel()[max(4, numbers.size - 4) :]]
    return f"{title}: {' '.join(shown)}"
