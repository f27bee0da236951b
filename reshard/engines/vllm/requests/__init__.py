"""Where requests enter a vLLM engine, and what is answered to one that may not be served.

`gate` is an engine core's own: it knows what the core's workers hold, asks the `admissions` about each
request, and answers those that are refused. `core` puts the gate before vLLM's engine core, in whichever
process that runs. `front` turns a refused request's answer into an error of the call that sent it.

Names of vLLM that are no part of its interface are in `core` and `front` only.
"""
