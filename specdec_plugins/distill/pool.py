"""Features of some of the texts, on disk, so that each serves many steps and a resumed run goes on at once.

Texts stand in groups of eight of about the same length, which are tapped together. The groups come in one order for
ever, again from the start when it ends. At step s the pool holds a window of them: the first few, one more for every
`fresh` steps, and the oldest go where the pool is full. So what a step reads is a function of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch
from attrs import define, field
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec_plugins.distill.corpus import Text
from specdec_plugins.distill.features import Features

GROUP = 8
_FIRST = 16  # groups before the first step
_SORTED = 16  # groups among which texts are put in the order of their lengths


def groups_of(texts: Sequence[Text], seed: int) -> list[list[Text]]:
    """All texts in groups, in random order."""
    generator = torch.Generator().manual_seed(seed)
    mixed = [texts[index] for index in torch.randperm(len(texts), generator=generator).tolist()]
    groups = []
    for begin in range(0, len(mixed), _SORTED * GROUP):
        near = sorted(mixed[begin : begin + _SORTED * GROUP], key=lambda text: len(text.tokens))
        groups += [near[first : first + GROUP] for first in range(0, len(near), GROUP)]
    return [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]


@final
@define(eq=False)
class Pool:
    """A window of groups.

    Attributes:
        folder: where features lie.
        groups: all there are.
        tap: gives the features of a group.
        room: most groups at once.
        fresh: steps between two new groups.
    """

    folder: Path
    groups: Sequence[Sequence[Text]]
    tap: Callable[[Sequence[Text]], list[Features]]
    room: int
    fresh: int
    _held: set[int] = field(init=False, factory=set)

    def window(self, step: int) -> range:
        """Numbers of the groups a step chooses from, counted on through all rounds."""
        end = _FIRST + step // self.fresh
        if len(self.groups) <= self.room:
            return range(min(end, len(self.groups)))
        return range(max(0, end - self.room), end)

    def draw(self, step: int, count: int, generator: torch.Generator) -> list[tuple[Text, Features]]:
        """Random texts of the window, with features."""
        window = self.window(step)
        numbers = [number % len(self.groups) for number in window]
        self._hold(numbers)
        places = [(number, place) for number in numbers for place in range(len(self.groups[number]))]
        chosen = torch.randperm(len(places), generator=generator)[:count].tolist()
        return [
            (self.groups[number][place], self._read(number, place)) for number, place in map(places.__getitem__, chosen)
        ]

    def _hold(self, numbers: Sequence[int]) -> None:
        if self._held == (wanted := set(numbers)):
            return
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.iterdir():
            if path.stem not in map(str, wanted):
                path.unlink()
        for number in numbers:
            if not self._path(number).exists():
                self._write(number)
        self._held = wanted

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _write(self, number: int) -> None:
        found = self.tap(self.groups[number])
        tensors: dict[str, Tensor] = {}
        for place, features in enumerate(found):
            tensors |= {f"{place}.tapped": features.tapped, f"{place}.final": features.final}
        temporary = self._path(number).with_suffix(".new")
        save_file(tensors, temporary)
        temporary.replace(self._path(number))

    def _read(self, number: int, place: int) -> Features:
        with safe_open(self._path(number), framework="pt") as file:
            return Features(file.get_tensor(f"{place}.tapped"), file.get_tensor(f"{place}.final"))
