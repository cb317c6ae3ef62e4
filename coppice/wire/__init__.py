"""Between protobuf and our own types: conversion, and limits on a message's fields before it is parsed.

For the services' doors and their clients.
"""
