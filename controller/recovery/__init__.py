"""Why an attempt failed, and what to do: observation, diagnosis, response.

The first two steps of a run and its end are in `controller/run/`. Imports records and resources; diagnosis and response
are pure.
"""
