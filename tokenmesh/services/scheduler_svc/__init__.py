"""scheduler_svc: places requests on workers, queues them, and refuses those beyond the bounds."""
