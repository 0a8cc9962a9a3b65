#!/bin/sh
echo corn
