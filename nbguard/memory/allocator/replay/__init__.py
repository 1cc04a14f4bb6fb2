"""The replay of a recorded trace on the model, under the recorded and under other settings."""
