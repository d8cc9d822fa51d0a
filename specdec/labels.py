"""Where names go in a figure so that none hides another or a point. Plain geometry, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

from attrs import frozen

Point = tuple[float, float]
_RADII = (7, 14, 22, 32, 44, 58, 74, 92, 112, 134, 160, 190)
_TURNS = 16
_POINT = 4.5


@final
@frozen
class Box:
    """A rectangle, its sides along the axes."""

    left: float
    bottom: float
    right: float
    top: float

    def meets(self, other: Box) -> float:
        """The area that two boxes share."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(wide, 0.0) * max(high, 0.0)

    def outside(self, frame: Box) -> bool:
        """Whether a part of it is not in the frame."""
        return self.left < frame.left or self.right > frame.right or self.bottom < frame.bottom or self.top > frame.top


def place(
    points: Sequence[Point], sizes: Sequence[tuple[float, float]], frame: Box, avoid: Sequence[Point] = ()
) -> list[Box]:
    """A box for each point's name, near it: names in a crowd choose first, where nothing is taken yet.

    Args:
        points: what has a name.
        sizes: width and height of each name.
        frame: no name leaves it.
        avoid: other places that should stay free.
    """
    marks = [Box(x - _POINT, y - _POINT, x + _POINT, y + _POINT) for x, y in points]
    marks += [Box(x - 2, y - 2, x + 2, y + 2) for x, y in avoid]

    def crowd(index: int) -> float:
        return sum(1 / (20 + math.dist(points[index], other)) for other in points)

    taken: dict[int, Box] = {}
    for index in sorted(range(len(points)), key=lambda index: (-crowd(index), index)):
        others = [*marks, *taken.values()]
        boxes = [box for box in _around(points[index], sizes[index]) if not box.outside(frame)]
        boxes = boxes or [_inside(points[index], sizes[index], frame)]
        free = (box for box in boxes if not any(box.meets(other) for other in others))
        # The nearest; in a full figure the one that hides least.
        taken[index] = next(free, None) or min(boxes, key=lambda box: sum(map(box.meets, others)))
    return [taken[index] for index in range(len(points))]


def spread(heights: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Heights in the same order, a step apart at least, between two limits where there is room."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    found = [0.0] * len(heights)
    floor = -math.inf
    for index in order:
        found[index] = floor = max(heights[index], floor + step, low)
    ceiling = max(high, low + step * (len(heights) - 1))
    for index in reversed(order):
        found[index] = min(found[index], ceiling)
        ceiling = found[index] - step
    return found


def _around(point: Point, size: tuple[float, float]) -> list[Box]:
    """From near to far; on each round to the right first."""
    wide, high = size
    boxes = []
    for radius in _RADII:
        for turn in sorted(range(_TURNS), key=lambda turn: min(turn, _TURNS - turn)):
            angle = 2 * math.pi * turn / _TURNS
            # The box lies on the far side of the spot, so that its near side is what the radius says.
            x = point[0] + radius * math.cos(angle) + wide / 2 * math.cos(angle)
            y = point[1] + radius * math.sin(angle) + high / 2 * math.sin(angle)
            boxes.append(Box(x - wide / 2, y - high / 2, x + wide / 2, y + high / 2))
    return boxes


def _inside(point: Point, size: tuple[float, float], frame: Box) -> Box:
    left = max(frame.left, min(point[0], frame.right - size[0]))
    bottom = max(frame.bottom, min(point[1], frame.top - size[1]))
    return Box(left, bottom, left + size[0], bottom + size[1])
