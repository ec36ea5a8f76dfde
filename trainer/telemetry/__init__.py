"""What a run tells: metrics, transcripts, TensorBoard, times, the start-up report, and how files that grow are sent.

Alerts are judged by the controller. Imports checkpoint's storage, no loop.
"""
