"""The care of a training, by profiles of fits, predictions, the doctor, ranks, records of runs."""
