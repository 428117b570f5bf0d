"""The command `cudascope` and the cell magic `%%cuda`. Public: nothing: a shell or a notebook starts them."""
