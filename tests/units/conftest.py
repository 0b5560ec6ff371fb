from tests.units.hand import made

__all__ = ["made"]
