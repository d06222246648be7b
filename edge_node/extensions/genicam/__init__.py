"""GenICam cameras: images from GigE Vision and USB3 Vision devices."""
