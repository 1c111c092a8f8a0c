"""Several processes that serve one gateway: `gateway.workers` of its recipes.

The parent (`pool.WorkerPool`) holds the listening sockets, which all workers accept connections on, and starts again
what dies or hangs. Its `coordinator.Coordinator` has what there is once, whatever the number of workers: the queue of
each model, with the places of its engine, and the probes of its servers. A worker is an ordinary gateway whose models
have a `worker.LeasedQueue` and a `worker.SharedReadiness`: it asks the parent for a place over a socket
(`link.WorkerLink`, one exchange of messages a request), and hears from it whether servers are well.

Limits of tenants are in memory that all workers map (`link.SharedUsage`). Counters and histograms are files that
all workers map, too (`prometheus_client.values.MultiProcessValue`); a worker that takes the place of another goes on
with its files, so no counter falls. The response cache is a file or a server anyway, and stored responses
(`pipeline.gateway.api.responses.stored`) are on a server, or in a file beside these.

What stays apart in each worker: single flight (two equal questions at the same time on two workers are generated
twice), the hot tier of the cache, and its share of gateway.max_connections.
"""
