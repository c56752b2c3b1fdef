"""The open inference protocol, version 2, as KServe, Triton and OpenVINO's model server speak it.

A folder of models is loaded into sessions of the daemon's own host; requests of any client of that
protocol run them.

| module | what it holds |
|---|---|
| `tensors` | elements of requests as arrays, and arrays as elements; pure |
| `repository` | the folder: models, versions and `model.toml` |
| `batching` | which requests share the next run; pure |
| `models` | a version that is opened: its session, plans, inputs and outputs |
| `prompts` | requests to language models; pure |
| `writers` | language models that continue prompts, each on an event loop of its own |
| `loaded` | a version that takes requests |
| `dispatcher` | the queue and the runs of a loaded model |
| `sequences` | the sessions of sequences |
| `statistics` | counts and times of a loaded model |
| `shared_regions` | shared memory of clients |
| `requests`, `descriptions` | parameters of requests, and what is told of models; pure |
| `registry` | all models: load, unload, reload, look for changes |
| `grpc_service`, `rest` | the protocol in its two forms |
| `listener` | their addresses and servers |
"""
