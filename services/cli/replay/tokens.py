"""Token ids as the replay holds them: arrays of u32, four bytes each."""

from array import array
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Tokens: TypeAlias = array[int]
else:
    Tokens = array  # not subscriptable before Python 3.12
