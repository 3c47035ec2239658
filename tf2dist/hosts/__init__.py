"""The meeting of many hosts: which process holds which task, whether all agree, and which were lost.

Never imports TensorFlow.
"""
