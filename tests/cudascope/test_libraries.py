"""cuda::std, thrust and cuRAND in kernels. The numbers of cuRAND were made with NVIDIA's header, on a CPU."""

from pathlib import Path

import numpy as np
import pytest

from cudascope import CudaKernel, check

pytestmark = pytest.mark.slow  # a build of large headers
FILE = Path(__file__).parent / "libraries.cu"


def test_cuda_std_and_thrust():
    triple = np.dtype({"names": "abc", "formats": ["i1", "f4", "i2"], "offsets": [0, 4, 8], "itemsize": 12})
    given, changed = np.array([(1, 2, 3), (4, 5.5, 6)], triple), np.zeros(2, triple)
    out = np.zeros(11, np.float32)
    with check():
        CudaKernel(FILE, "standard")[1, 1](given.view(np.uint8), out, changed.view(np.uint8))
    assert out.tolist() == [7, 5.5, 6, -3, np.finfo(np.float32).max, 8, 5.5, 11, 101, 3.25, 1]
    assert changed.tolist() == [(0, 9, 0), (ord("c"), 2, 3)]


# For each of XORWOW, Philox and MRG32k3a, the strings hold three lists. The first list has six integers and one after
# each skip. The second list has three uniform, three normal and three log-normal floats. The third list has three
# uniform and three normal doubles.
SEED, SEQUENCE, OFFSET = 99, 123456789012345, 98765432109
DRAWS = (
    (
        "624914564 3524361838 3638727274 2083922184 2890676844 2916447140 1663258580 2139172479",
        "0x1.cd421p-1 0x1.6de2p-3 0x1.21e942p-1 0.60333 0.77638 -0.17381 2.3729 1.8572 1.2524",
        "0x1.e641c34ecca2ap-3 0x1.4061c4e6267bep-3 0x1.5d9899257ecaep-3 -0.221746182 -1.389771098 -0.676064206",
    ),
    (
        "2987200418 408890074 3710540965 1723900270 1589653566 3808551965 3905724187 1594543131",
        "0x1.fb08eep-1 0x1.e7da4ap-1 0x1.e9e58ep-1 0.30814 0.54117 -0.20658 1.8339 1.1855 1.7610",
        "0x1.b94829d6p-1 0x1.623c148cp-2 0x1.dee472fcp-2 0.900297824 0.340837641 0.213428342",
    ),
    (
        "190835829 1565969063 4254434730 2749251463 1276888638 3561576289 4157668548 272354726",
        "0x1.b272ecp-3 0x1.63c164p-1 0x1.186eb6p-2 -0.33413 -0.65424 -0.55520 1.8153 1.5393 0.9154",
        "0x1.f23cf99ac3c7dp-1 0x1.cc92a53803b8fp-2 0x1.32cbf67278844p-3 1.126639188 0.462870458 0.093855202",
    ),
)


def number(text: str) -> float:
    return float.fromhex(text) if "x" in text else float(text)


def test_cuRAND_draws_nvidias_numbers():
    bits, floats, doubles = np.zeros(31, np.uint32), np.zeros((3, 9), np.float32), np.zeros((3, 6))
    with check():
        CudaKernel(FILE, "generators")[1, 1](np.array([SEED, SEQUENCE, OFFSET], np.uint64), bits, floats, doubles)
    for i, (integers, singles, wide) in enumerate(DRAWS):
        assert bits[8 * i : 8 * i + 8].tolist() == [int(each) for each in integers.split()]
        singles, wide = [[number(each) for each in row.split()] for row in (singles, wide)]
        assert floats[i, :3].tolist() == singles[:3]
        assert doubles[i, :3].tolist() == wide[:3]
        np.testing.assert_allclose(floats[i, 3:], singles[3:], atol=6e-5)  # as many digits as are given
        np.testing.assert_allclose(doubles[i, 3:], wide[3:], atol=1e-9)
    assert bits[24:28].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # Random123's known answer
    assert bits[28:].tolist() == [48, 64, 48]
    CudaKernel(FILE, "generators")[1, 1](np.zeros(3, np.uint64), bits, floats, doubles)
    mrg = [545508615, 1368065476, 1327943825, 3546985268, 951893240, 2290915747]
    assert bits[16:22].tolist() == mrg  # MRG32k3a does not mix a seed of 0 into its state


def test_an_offset_of_cuRAND_is_as_many_draws():
    out = np.zeros((6, 8), np.uint32)
    CudaKernel(FILE, "steps")[1, 8](out)
    xorwow, skipped, four, philox, mrg, leapt = out
    assert xorwow.tolist() == skipped.tolist()
    assert four.tolist() == philox.tolist()
    assert mrg.tolist() == leapt.tolist()
    assert len(set(out[::2].flat)) == 24
