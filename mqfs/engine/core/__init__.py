"""The log of one group as the engine sees it: its clock, bodies in parts."""

from __future__ import annotations


