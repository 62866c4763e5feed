"""Sources of messages that a broker hands out once: "penstock-amqp" and "penstock-mqtt".

Such a broker has no offsets to read from again. It keeps what is not acknowledged, and hands it
out anew when the connection is gone. So a message is acknowledged when Spark has noted that its
batch is done, and not before: whatever kills the driver, the broker has the messages still.
"""
