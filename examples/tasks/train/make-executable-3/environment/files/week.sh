#!/bin/sh
echo iron
