"""Communication between ranks: messages, buffers, transports."""
