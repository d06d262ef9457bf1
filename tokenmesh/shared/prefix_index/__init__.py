"""The prefix index in Redis: which worker holds which route blocks, and what is reserved on it.

Workers write what they hold, schedulers read it. `keys` says where; nothing else knows.
"""
