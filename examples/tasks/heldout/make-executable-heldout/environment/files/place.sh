#!/bin/sh
echo rose
