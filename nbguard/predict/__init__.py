"""What a run would do on a device that is not there. Works with torch's tensors, and is imported only when it is used."""
