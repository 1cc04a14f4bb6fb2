"""The live sidebar, with protocol, hub, and the widget in an output cell."""
