"""What travels between ranks, and how: messages, buffers, transports."""
