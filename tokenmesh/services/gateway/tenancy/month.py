"""The month that usage is counted in: of the calendar, in UTC."""

import calendar
import time


def month_of(seconds: float) -> str:
    """Such as 2026-11."""
    return time.strftime("%Y-%m", time.gmtime(seconds))


def seconds_left(seconds: float) -> float:
    """Until the next month begins."""
    now = time.gmtime(seconds)
    year, month = divmod(now.tm_year * 12 + now.tm_mon, 12)
    return calendar.timegm((year, month + 1, 1, 0, 0, 0)) - seconds
