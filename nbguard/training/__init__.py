"""The care of a training: profiles of fits, predictions, the doctor, ranks, records of runs."""
