"""The processes of one host: started, watched, restarted and stopped. Never imports TensorFlow."""
