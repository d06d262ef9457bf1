"""scheduler_svc: which worker takes a request, who waits, who is refused."""
