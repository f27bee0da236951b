"""Messages of a connect and a refit."""
