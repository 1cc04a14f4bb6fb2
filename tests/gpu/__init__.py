"""What only a real GPU can show: tests (marker `gpu`), recordings, figures. `day.py` does all of it in one command."""
