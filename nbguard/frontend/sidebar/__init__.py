"""The live sidebar: protocol, hub, and the widget in an output cell."""
