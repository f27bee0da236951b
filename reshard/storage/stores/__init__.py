"""Object stores (``s3://``, ``gs://``, any URL of fsspec's) as sources and destinations."""
