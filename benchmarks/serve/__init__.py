"""The load generator: a lean client, workloads, two ways to send them, a report."""
