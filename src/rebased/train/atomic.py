"""Files that are whole or not there: the name under which `train` knows `rebased.atomic`."""

from rebased.atomic import PARTIAL, replacing

__all__ = ["PARTIAL", "replacing"]
