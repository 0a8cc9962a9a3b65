#!/bin/sh
echo west
